//go:build !amd64

package guest

// starterImage is empty: there is no starter for this machine, and commands that wait for
// a person make the guest wait.
func starterImage() []byte { return nil }
