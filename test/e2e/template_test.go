package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestOwnTemplates: the server's own templates have what their definitions promise, and
// one that is not built yet is built at its first use.
func TestOwnTemplates(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	// The first use may find it built already.
	var slim *box
	for began := time.Now(); slim == nil; time.Sleep(time.Second) {
		status, b, err := s.create(map[string]any{"templateID": "slim", "timeout": 600})
		switch {
		case err != nil:
			t.Fatal(err)
		case status == http.StatusCreated:
			slim = b
		case status != http.StatusServiceUnavailable || time.Since(began) > 10*time.Minute:
			t.Fatalf("slim: got status %d after %v, want it built\n%s", status, time.Since(began), s.log)
		}
	}
	base := s.sandbox(nil)
	for name, tt := range map[string]struct {
		b          *box
		command    string
		out, fails string // beginning of the output; or of the error
	}{
		"slim has a shell and curl":            {slim, "id -un; curl --version | head -c 5; sudo -n id -un", "user\ncurl root\n", ""},
		"slim has no python":                   {slim, "python3 -c 1", "", "bash"},
		"git and jq":                           {base, "git init -q g; echo '{\"a\":1}' | jq .a", "1\n", ""},
		"a compiler":                           {base, "echo 'int main(){return 0;}' >a.c && gcc a.c && ./a.out && make -v >/dev/null; echo $?", "0\n", ""},
		"node and npm":                         {base, "node -p 'process.version.split(\".\")[0]'; npm config get prefix", "v26\n/usr/local\n", ""},
		"python":                               {base, "python3 -c 'import numpy, pandas, requests, bs4, openpyxl; print(numpy.ones(2).sum())'; python -m venv v && v/bin/python -c 'print(1)'", "2.0\n1\n", ""},
		"languages of the interpreter":         {base, "R --version >/dev/null && javac -version; echo $?", "javac 17", ""},
		"the user writes what E2B's user may":  {base, "touch /code/a /usr/local/bin/a /usr/local/lib/a /usr/local/share/a && echo ok", "ok\n", ""},
		"attacker: another user's programs":    {base, "sudo -n setpriv --reuid 61000 --regid 61000 --clear-groups touch /usr/local/bin/node", "", "touch: cannot touch"},
		"attacker: the guest's directory":      {base, "touch /usr/local/sbin/a", "", "touch: cannot touch"},
		"attacker: a directory of root":        {base, "touch /etc/a", "", "touch: cannot touch"},
		"nothing of the build is in the image": {base, "ls /opt; find /var/log /var/cache/apt -type f; ls /root/.npm 2>&1 | head -c 3", "postern\nls:", ""},
	} {
		r := tt.b.run(tt.command)
		if !strings.HasPrefix(r.stdout, tt.out) || tt.fails == "" && (r.exit != 0 || r.stderr != "") || tt.fails != "" && (r.exit == 0 || !strings.Contains(r.stderr, tt.fails)) {
			t.Errorf("%s: got %+v", name, r)
		}
	}
}
