"""The wire contract: messages, their conversions, and what services share in using them."""
