"""What kinds of layers with pages of their own save, and where they lose.

    python -m benchmarks.kinds.run [--section waste,capacity] [--num-requests 450] [--seed 0]

``waste``: bytes that one request holds, counted by the memory core, beside vLLM's groups of layers.
``capacity``: requests at once in a fixed pool, simulated. Prints the tables and keeps them in
``results/<date>-counted/``. Nothing here is a time: the machine may be busy.
"""

from __future__ import annotations

from benchmarks.kinds import capacity, waste
from vmserve_bench.lab import script
from vmserve_bench.lab.suite import chosen


def main() -> None:
    parser = script.parser(__doc__, section=None, num_requests=450, seed=0)
    args = parser.parse_args()
    if args.num_requests < 12:
        parser.error("--num-requests: give 12 or more, or no prefix is shared")
    results, tables = {}, []
    for name in chosen("section", args.section, ("waste", "capacity")):
        section = waste if name == "waste" else capacity
        rows = list(
            waste.rows() if name == "waste" else capacity.rows(args.num_requests, args.seed)
        )
        results[name] = {"rows": rows}
        for model in dict.fromkeys(row["model"] for row in rows):
            own = (row for row in rows if row["model"] == model)
            title = section.TITLE.format(model)
            tables.append(script.table_of(title, own, section.COLUMNS, section.NOTE))
    script.publish(__file__, args, tables, {"results": results}, device="counted")


if __name__ == "__main__":
    main()
