"""`python -m vocabtp.opsd` is the command `vocabtp-opsd`."""

from vocabtp.opsd.cli import main

if __name__ == "__main__":
    main()
