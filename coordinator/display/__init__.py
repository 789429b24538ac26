"""What commands and the page show alike: values of views by name, and numbers, watts and times as people read them."""
