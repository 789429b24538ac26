"""Display code shared by commands and page: values of views by name, and formatted numbers, watts and times."""
