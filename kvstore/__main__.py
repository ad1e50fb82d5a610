"""`python -m kvstore` is the `kvstore` command."""

from kvstore.cli import main

if __name__ == "__main__":
    main()
