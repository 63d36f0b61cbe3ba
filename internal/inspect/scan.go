package inspect

import (
	"bytes"
	"errors"
	"io"

	"postern/internal/inject"
)

// errSentinel ends a request whose body has a sentinel where it is not replaced.
var errSentinel = errors.New("the body has a placeholder of a secret after the first MiB, or in a stream, where it is not replaced")

// A sentinelScan ends a body at the first sentinel of the sandbox. Its request
// fails, so that the server does not take the sentinel for a key and the program
// learns of it.
type sentinelScan struct {
	r       io.Reader
	secrets []inject.Secret
	tail    []byte // the end of what was read before, shorter than a sentinel
}

// Read implements [io.Reader].
func (s *sentinelScan) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if n == 0 {
		return n, err
	}
	// A sentinel may begin in what was read before.
	seam := append(s.tail, p[:min(n, maxSentinel)]...)
	for _, sec := range s.secrets {
		for _, v := range []string{sec.Sentinel, sec.AccessKey} {
			if v != "" && (bytes.Contains(p[:n], []byte(v)) || bytes.Contains(seam, []byte(v))) {
				return 0, errSentinel
			}
		}
	}
	if n >= maxSentinel {
		s.tail = append(s.tail[:0], p[n-maxSentinel:n]...)
	} else {
		s.tail = append(s.tail[:0], seam[max(0, len(seam)-maxSentinel):]...)
	}
	return n, err
}

// maxSentinel is more than the length of a sentinel, in bytes.
const maxSentinel = 64
