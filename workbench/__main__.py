"""`python -m workbench`: the command line, where its script is not on the path."""

from workbench.cli import main

if __name__ == "__main__":
    main()
