"""`python -m deepinfer`."""

from deepinfer.cli import main

main()
