package contract

import (
	"bytes"
	_ "embed" // for the sample
	"fmt"
)

//go:embed sample.yaml
var sample []byte

// Sample returns a contract with comments to begin with, under the given name. The error
// wraps [ErrInvalid] if that is no name of a contract.
func Sample(name string) ([]byte, error) {
	if !namePattern().MatchString(name) || len(name) > 63 {
		return nil, fmt.Errorf(`%w: name: %q must be 1 to 63 lower-case letters and digits with single "-" between, a letter first`, ErrInvalid, clip(name))
	}
	return bytes.Replace(sample, []byte("name: sample"), []byte("name: "+name), 1), nil
}
