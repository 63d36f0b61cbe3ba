package main

import (
	"strings"
	"testing"

	"postern/client"
)

func TestStartedLineHidesNothingBehindSpaces(t *testing.T) {
	spaces := strings.Repeat(" ", 300)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"/bin/bash", "-l", "-c", spaces}, "/bin/bash -l -c <300 spaces>"},
		{[]string{"bash", "-c", "true" + spaces + "; rm -r x"}, `bash -c "true <300 spaces> ; rm -r x"`},
		{[]string{"bash", "<300 spaces>", " a  b "}, `bash "<300 spaces>" " a  b "`},
	} {
		if got := startedLine(client.SandboxCommand{Path: "/usr/bin/bash", Args: c.args}); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
