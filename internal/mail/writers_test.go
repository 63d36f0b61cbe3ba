package mail

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"os"
	"os/exec"
	"testing"
)

// TestMailProgramsAreAccepted: what nodemailer and Python's email write, in all the ways
// in which their users have them write, is let in as it is.
func TestMailProgramsAreAccepted(t *testing.T) {
	if _, err := os.Stat("../../test/mail/node_modules/nodemailer"); err != nil {
		t.Fatalf("%v: test/install-npm test/mail installs it", err)
	}
	for _, args := range [][]string{{"node", "../../test/mail/writers.mjs"}, {"python3", "../../test/mail/writers.py"}} {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); n++ {
			raw, err := base64.StdEncoding.DecodeString(sc.Text())
			if err != nil {
				t.Fatal(err)
			}
			e, err := FromCaptured(raw, genInbox, []string{"b@x.example", "u@y.example"}, genInbox, now)
			if err != nil {
				t.Errorf("%s, message %d: %v\n%.1500s", args[0], n, err, raw)
				continue
			}
			if doubts, err := Doubts(e.Raw); err != nil || len(doubts) > 0 {
				t.Errorf("%s, message %d: a person is asked: %q, %v", args[0], n, doubts, err)
			}
		}
		if n < 10 {
			t.Errorf("%s wrote %d messages", args[0], n)
		}
	}
}
