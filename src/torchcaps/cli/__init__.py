"""The command line: parses and prints, one small module a command.

Nothing heavy is imported before a command runs, so that help and mistyped options are answered at once.
"""
