package smtpserver

import (
	"context"
	"time"
)

// pause delays a conversation. If a quarter of all conversations are being delayed
// it ends this one instead, so that they cannot use up the connections. It returns
// false if the conversation ends.
func (s *Server) pause(k *link, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	if s.pausing.Add(1) > int64(max(1, s.cfg.MaxConnections/4)) {
		s.pausing.Add(-1)
		k.doom()
		return false
	}
	defer s.pausing.Add(-1)
	return s.wait(k, d)
}

// wait waits for d, or until the server stops.
func (s *Server) wait(k *link, d time.Duration) bool {
	ctx, cancel := context.WithTimeout(k.ctx, d)
	defer cancel()
	select {
	case <-ctx.Done():
		return k.ctx.Err() == nil
	case <-k.closed:
	case <-s.stopping:
		k.doom()
	}
	return false
}
