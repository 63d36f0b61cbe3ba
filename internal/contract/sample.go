package contract

import (
	"bytes"
	_ "embed" // for the sample
	"fmt"
)

//go:embed sample.yaml
var sample []byte

// Sample returns a commented contract to start from, with the given name. The error
// wraps [ErrInvalid] if the name is invalid.
func Sample(name string) ([]byte, error) {
	if !namePattern().MatchString(name) || len(name) > 63 {
		return nil, fmt.Errorf(`%w: name: %q must have 1 to 63 lower-case letters, digits and single hyphens, and begin with a letter`, ErrInvalid, clip(name))
	}
	return bytes.Replace(sample, []byte("name: sample"), []byte("name: "+name), 1), nil
}
