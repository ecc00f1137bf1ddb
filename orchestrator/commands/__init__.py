"""One module per subcommand of `untildone`; each is imported only when it is called, so that `--help` stays fast."""
