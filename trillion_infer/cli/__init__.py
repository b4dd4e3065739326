"""What the launch scripts share: flags read from the library's own signatures, and one-line errors."""
