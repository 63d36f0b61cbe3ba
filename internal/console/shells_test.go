package console

import (
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
)

// TestTicketsOfOthers: a person who requests many terminals does not use up the tickets of
// another person.
func TestTicketsOfOthers(t *testing.T) {
	s := shells{tickets: map[string]ticket{}}
	ask := func(project, name string, until time.Time) error {
		_, err := s.issue(ticket{who: auth.Principal{Kind: auth.Person, ID: name, Project: project}, until: until})
		return err
	}
	soon := time.Now().Add(ticketFor)
	for range 300 {
		_ = ask("prj_mallory", "ann", soon)
	}
	if err := ask("prj_mallory", "ann", soon); !errors.Is(err, errStreams) {
		t.Errorf("without a limit: %v", err)
	}
	if n := len(s.tickets); n > maxTickets {
		t.Errorf("one person has %d tickets", n)
	}
	for _, other := range [][2]string{{"prj_one", "ann"}, {"prj_mallory", "bob"}} {
		if err := ask(other[0], other[1], soon); err != nil {
			t.Errorf("%v: %v", other, err)
		}
	}
	for name, old := range s.tickets {
		old.until = time.Now().Add(-time.Second)
		s.tickets[name] = old
	}
	if err := ask("prj_mallory", "ann", soon); err != nil || len(s.tickets) != 1 {
		t.Errorf("after their time: %v, %d are kept", err, len(s.tickets))
	}
}
