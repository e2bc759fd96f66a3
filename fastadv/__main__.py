"""`python -m fastadv` is the `fastadv` command."""

from fastadv.cli import main

if __name__ == "__main__":
    main()
