"""Print the figures of docs/operate/topologies.md."""

import argparse

from tests.lab.benchmarks.bench import set_up


def main() -> None:
    argparse.ArgumentParser(prog="python -m tests.lab.sizing", description=__doc__).parse_args()
    set_up()

    from .measure import every_figure  # Django must be set up first

    for title, figures in every_figure():
        print(f"{title}\n")
        for what, value in figures.items():
            print(f"  {value:>8,}  {what}")
        print(flush=True)


if __name__ == "__main__":
    main()
