package inspect

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"postern/internal/inject"
)

// A sentinelScan passes a body on as it is, and tells of each secret whose sentinel is
// in it. A sentinel there is text: no value goes into a stream.
type sentinelScan struct {
	r       io.Reader
	secrets []inject.Secret
	found   func(s *inject.Secret)
	tail    []byte // the end of what was read before, shorter than a sentinel
	told    []bool // by secret
}

// Read implements [io.Reader].
func (s *sentinelScan) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.look(p[:n])
	return n, err
}

// look searches what passes.
func (s *sentinelScan) look(p []byte) {
	if len(p) == 0 {
		return
	}
	if s.told == nil {
		s.told = make([]bool, len(s.secrets))
	}
	// A sentinel may begin in what was read before.
	seam := append(s.tail, p[:min(len(p), maxSentinel)]...)
	for i := range s.secrets {
		sec := &s.secrets[i]
		if s.told[i] || sec.Sentinel == "" {
			continue
		}
		if v := []byte(sec.Sentinel); bytes.Contains(p, v) || bytes.Contains(seam, v) {
			s.told[i] = true
			s.found(sec)
		}
	}
	if len(p) >= maxSentinel {
		s.tail = append(s.tail[:0], p[len(p)-maxSentinel:]...)
	} else {
		s.tail = append(s.tail[:0], seam[max(0, len(seam)-maxSentinel):]...)
	}
}

// maxSentinel is more than the length of a sentinel, in bytes.
const maxSentinel = 64

// stayed notes that the placeholder of a secret left as text.
func (x *exchange) stayed(s *inject.Secret, where string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !slices.ContainsFunc(x.stays, func(o inject.Stay) bool { return o.Secret == s.Name && o.Where == where }) {
		x.stays = append(x.stays, inject.Stay{Secret: s.Name, Where: where})
	}
}

// maxTold is how many placeholders one entry of the record names.
const maxTold = 3

// tellStays records the placeholders that left as text. If the server has refused the
// request, the entry says how an owner has them replaced: the program had perhaps meant
// the value.
func (x *exchange) tellStays(ctx context.Context) {
	for name, values := range x.in.Trailer { // they are complete when the body has ended
		for i := range x.secrets {
			s := &x.secrets[i]
			if s.Sentinel != "" && strings.Contains(strings.ToLower(name)+" "+strings.Join(values, " "), s.Sentinel) {
				x.stayed(s, "trailer")
			}
		}
	}
	x.mu.Lock()
	stays := x.stays
	x.mu.Unlock()
	if len(stays) == 0 {
		return
	}
	refused := x.status >= 400 && x.status < 500
	var all, open []string
	for i, s := range stays {
		if i == maxTold {
			all = append(all, fmt.Sprintf("and %d more", len(stays)-i))
			break
		}
		all = append(all, s.Secret+" ("+s.Where+")")
		if c := s.Command(); c != "" {
			open = append(open, c)
		}
	}
	reason := "no value was put in for the placeholder of " + strings.Join(all, ", ")
	if refused {
		reason += fmt.Sprintf("; the answer was %d", x.status)
		if len(open) > 0 {
			reason += ". If the value belongs there: " + strings.Join(open, "; ")
		} else {
			reason += ". Values go into header fields, and into places that an owner has opened: postern help secret open"
		}
	}
	x.s.l.report(ctx, Event{
		Kind: Stayed, Dst: x.s.conn.Dst, Method: x.in.Method, Scheme: x.s.scheme(), Host: x.s.conn.Host, Path: x.in.URL.EscapedPath(), Status: x.status, Reason: reason,
	})
}
