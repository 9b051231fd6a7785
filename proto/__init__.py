"""The wire contract: parameter_server.proto and the code generated from it (`make proto`)."""
