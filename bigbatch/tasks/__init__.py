"""The built-in tasks of the command line: real data, small models, one folder for each framework."""
