"""Stand-in for IPython, which a module of SGLang imports for notebooks."""  # noqa: N999 - its name
