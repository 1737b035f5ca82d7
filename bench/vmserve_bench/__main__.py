"""``python -m vmserve_bench``: ``vmserve bench`` where the distribution is not installed."""

from vmserve.cli.main import main
from vmserve_bench.command import app

if __name__ == "__main__":
    main(app, "vmserve bench")
