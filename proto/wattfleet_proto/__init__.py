"""The protocol: messages, their conversions to domain types, and limits and errors that services share."""
