"""What a policy knows of its members, kept so that no event has to look through all of them."""
