package secret

import (
	"bytes"
	"errors"
	"testing"

	"postern/internal/scrub"
)

func TestBoxesOpenWhatIsTheirs(t *testing.T) {
	k, err := newKeys(bytes.Repeat([]byte{1}, 32), nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{keys: k, conf: Config{Scrub: &scrub.Scrubber{}}}
	one, err := s.Box("one")
	if err != nil {
		t.Fatal(err)
	}
	two, err := s.Box("two")
	if err != nil {
		t.Fatal(err)
	}
	sealed := one.Seal([]byte("password"), "project", "row")
	if bytes.Contains(sealed, []byte("password")) {
		t.Fatal("the value is in the clear")
	}
	if got, err := one.Open(sealed, "project", "row"); err != nil || string(got) != "password" {
		t.Errorf("got %q, %v", got, err)
	}
	for name, open := range map[string]func() ([]byte, error){
		"another row":      func() ([]byte, error) { return one.Open(sealed, "project", "row2") },
		"a moved boundary": func() ([]byte, error) { return one.Open(sealed, "projectr", "ow") },
		"another box":      func() ([]byte, error) { return two.Open(sealed, "project", "row") },
		"a changed value": func() ([]byte, error) {
			return one.Open(append(bytes.Clone(sealed[:len(sealed)-1]), sealed[len(sealed)-1]^1), "project", "row")
		},
		"nothing": func() ([]byte, error) { return one.Open(nil, "project", "row") },
	} {
		if got, err := open(); !errors.Is(err, ErrKey) || got != nil {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
}
