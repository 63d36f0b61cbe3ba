package template

// GuestDigest returns the SHA-256 of the guest in the templates, in hex. A snapshot
// made with another guest is out of date.
func (c *Cache) GuestDigest() string { return c.digest }
