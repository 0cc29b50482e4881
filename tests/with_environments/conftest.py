"""What runs against real environment libraries: ``make test-environments`` makes their environment. Elsewhere these tests are
skipped: openenv-core and textarena bring some eighty packages that llamarl has no use for."""
