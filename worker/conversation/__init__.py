"""What a worker says to its server and hears from it: connections, messages, retries."""
