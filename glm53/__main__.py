"""`python -m glm53` is `glm53`."""

from glm53.cli import main

main()
