"""`python -m keepstep`."""

from keepstep.cli import main

if __name__ == "__main__":
    main()
