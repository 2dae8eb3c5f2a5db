"""The start of the program: `asapctl`, and `python -m asapctl` where it is not on the path."""

from engine.launch.signals import handled_by, leave


def main() -> None:
    with handled_by(leave):  # nothing has begun that an exception would have to end in order
        from asapctl import standard_streams

        standard_streams.prepare()
        from asapctl.cli import run
    run()


if __name__ == "__main__":
    main()
