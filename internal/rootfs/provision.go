package rootfs

// Provision puts into the tree what every sandbox needs inside. It is idempotent.
func (t *Tree) Provision() error {
	return t.placeGuest()
}
