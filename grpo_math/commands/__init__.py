"""The commands of `grpo-math`, one file each: it parses the arguments, calls one function and prints the answer.

cli.py lists them. The functions are in the packages below. Each file stays free of torch until a command needs it.
"""
