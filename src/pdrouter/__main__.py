"""``python -m pdrouter``."""

from pdrouter.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
