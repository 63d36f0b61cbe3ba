package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// missingLibraries are default libraries of E2B's interpreter that base does not have, by the
// names by which programs import them. docs/compat.md names them.
const missingLibraries = "aiohttp bokeh cv2 docx gensim imageio joblib librosa networkx nltk numba plotly scipy seaborn skimage sklearn soundfile spacy textblob xarray xlrd"

// lacking is a command that prints which of these Python modules cannot be imported.
func lacking(modules string) string {
	return "python3 -c 'import importlib.util as u; print([n for n in \"" + modules + "\".split() if not u.find_spec(n)])'"
}

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
		"slim has a shell and curl":           {slim, "id -un; curl --version | head -c 5; sudo -n id -un", "user\ncurl root\n", ""},
		"slim has no python":                  {slim, "python3 -c 1", "", "bash"},
		"git and jq":                          {base, "git init -q g; echo '{\"a\":1}' | jq .a", "1\n", ""},
		"a compiler":                          {base, "echo 'int main(){return 0;}' >a.c && gcc a.c && ./a.out && make -v >/dev/null; echo $?", "0\n", ""},
		"node and npm":                        {base, "node -p 'process.version.split(\".\")[0]'; npm config get prefix", "v26\n/usr/local\n", ""},
		"python":                              {base, "python3 -c 'import numpy, pandas, requests, bs4, openpyxl; print(numpy.ones(2).sum())'; python -m venv v && v/bin/python -c 'print(1)'", "2.0\n1\n", ""},
		"languages of the interpreter":        {base, "R --version >/dev/null && javac -version; echo $?", "javac 17", ""},
		"the user writes what E2B's user may": {base, "touch /code/a /usr/local/bin/a /usr/local/lib/a /usr/local/share/a && echo ok", "ok\n", ""},
		// What docs/compat.md says of base and of rights inside.
		"no mount program":                      {base, "command -v mount umount; sudo python3 -c 'import ctypes, os; l = ctypes.CDLL(None, use_errno=True); print(l.mount(b\"x\", b\"/mnt\", b\"tmpfs\", 0, None), os.strerror(ctypes.get_errno()))'", "-1 Operation not permitted\n", ""},
		"no FUSE, and no file that promises it": {base, "test -e /dev/fuse || echo none; sudo mknod /dev/fuse c 10 229", "none\n", "mknod: /dev/fuse: Operation not permitted"},
		"no cgroup that Docker could use":       {base, "grep cgroup /proc/self/mounts || echo none", "none\n", ""},
		"namespaces of a user":                  {base, "unshare -Urmpf --mount-proc id -u", "0\n", ""},
		"a network namespace has no loopback":   {base, "unshare -Urn ip addr add 127.0.0.1/8 dev lo", "", "RTNETLINK answers"},
		"root changes its root":                 {base, "sudo chroot / id -u", "0\n", ""},
		"attacker: a user changes the root":     {base, "/usr/sbin/chroot / id -u", "", "Operation not permitted"},
		"file capabilities cannot be set":       {base, "cp /bin/ls l; sudo python3 -c 'import os; os.setxattr(\"l\", \"security.capability\", bytes.fromhex(\"0100000280000000000000000000000000000000\"))' 2>&1 | tail -1", "PermissionError: [Errno 1] Operation not permitted", ""},
		"libraries of the interpreter":          {base, lacking("PIL bs4 IPython lxml matplotlib numpy openpyxl pandas pytest pytz requests sympy tornado urllib3 yaml"), "[]\n", ""},
		"libraries that E2B's interpreter has":  {base, lacking(missingLibraries), "['" + strings.ReplaceAll(missingLibraries, " ", "', '") + "']\n", ""},
		"fonts":                                 {base, "ls /usr/share/fonts/truetype", "dejavu\nlyx\n", ""},
		"attacker: another user's programs":     {base, "sudo -n setpriv --reuid 61000 --regid 61000 --clear-groups touch /usr/local/bin/node", "", "touch: cannot touch"},
		"attacker: the guest's directory":       {base, "touch /usr/local/sbin/a", "", "touch: cannot touch"},
		"attacker: a directory of root":         {base, "touch /etc/a", "", "touch: cannot touch"},
		"nothing of the build is in the image":  {base, "ls /opt; find /var/log /var/cache/apt -type f; ls /root/.npm 2>&1 | head -c 3", "postern\nls:", ""},
	} {
		r := tt.b.run(tt.command)
		if !strings.HasPrefix(r.stdout, tt.out) || tt.fails == "" && (r.exit != 0 || r.stderr != "") || tt.fails != "" && (r.exit == 0 || !strings.Contains(r.stderr, tt.fails)) {
			t.Errorf("%s: got %+v", name, r)
		}
	}
}
