"""The report of a folder while its runs train: read a little at a time, served on the loopback interface."""
