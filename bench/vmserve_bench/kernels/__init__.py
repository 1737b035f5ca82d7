"""``vmserve bench kernels``: the CPU attention kernels against the machine and the stock kernel."""
