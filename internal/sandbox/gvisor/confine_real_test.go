package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// confined creates a sandbox that a contract binds, with the given inputs.
func confined(t *testing.T, f *sandbox.Fleet, who auth.Principal, template string, r sandbox.Request, c sandbox.Confinement, inputs map[string]string) sandbox.Info {
	t.Helper()
	r.Template, r.Contract, r.Options.Timeout = template, "job@sha256:1", 5*time.Minute
	r.Prepare = func(ctx context.Context, s sandbox.Info) error {
		if _, err := f.Dial(ctx, s.ID, sandbox.GuestPort); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("dial before the sandbox is confined: %v, want ErrNotFound", err)
		}
		if err := f.Confine(ctx, s.ID, c); err != nil {
			return err
		}
		for path, content := range inputs {
			if err := f.PutFile(ctx, s.ID, path, strings.NewReader(content)); err != nil {
				return err
			}
		}
		return nil
	}
	s, err := f.Create(t.Context(), who, r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// within runs a shell script in a confined sandbox, and returns its output and how it ended.
func within(t *testing.T, f *sandbox.Fleet, id, script string) (string, sandbox.Ended) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out strings.Builder
	e, err := f.RunCommand(ctx, id, sandbox.Command{Args: []string{"/bin/sh", "-c", "{ " + script + "\n} 2>&1"}}, func(_ byte, p []byte) error {
		out.Write(p)
		return nil
	})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSpace(out.String()), e
}

// TestConfinedProcessesCannotLeaveTheirView: the processes of a bound sandbox see its view
// of files and cannot leave it, whoever starts them, also after a pause.
func TestConfinedProcessesCannotLeaveTheirView(t *testing.T) {
	needRoot(t)
	root := withBusybox(t, distroless(t))
	// The template has files with loose permissions, and links that lead elsewhere.
	for _, err := range []error{
		os.MkdirAll(filepath.Join(root, "usr/share/open"), 0o777), os.Chmod(filepath.Join(root, "usr/share/open"), 0o777),
		os.MkdirAll(filepath.Join(root, "data/private"), 0o755), os.WriteFile(filepath.Join(root, "data/private/key"), []byte("the key\n"), 0o644),
		os.WriteFile(filepath.Join(root, "data/list"), []byte("a list\n"), 0o644),
		os.MkdirAll(filepath.Join(root, "home/user/project"), 0o755), os.WriteFile(filepath.Join(root, "home/user/.netrc"), []byte("a password\n"), 0o644),
		os.Symlink("/data/private", filepath.Join(root, "home/user/project/link")), os.WriteFile(filepath.Join(root, "home/user/project/main.go"), []byte("package main\n"), 0o644),
		os.Chmod(filepath.Join(root, "bin/busybox"), 0o4755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	services := filepath.Join(root, "etc/postern")
	if err := errors.Join(os.MkdirAll(services, 0o755), os.WriteFile(filepath.Join(services, "services"), []byte("/bin/sleep 12345\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	f, who, _ := newFleet(t, map[string]sandbox.Base{"t": {Rootfs: root, Key: "confined", User: "user", StartCmd: "sleep 23456", ReadyCmd: "true"}}, func(c *sandbox.Config) {
		c.Cold, c.Snapshots = false, true
	})
	if err := f.MakeTemplateSnapshot(t.Context(), "t", func(string) {}); err != nil {
		t.Fatal(err)
	}
	// In a sandbox without a contract root has none of the guest's own capabilities.
	free, err := f.Create(t.Context(), who, sandbox.Request{Template: "t", Options: sandbox.Options{Timeout: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := runIn(t, f, free.ID, "root", "/bin/sh", "-c", "id -u; /bin/busybox grep Cap /proc/self/status; /bin/busybox mount -t tmpfs x /mnt; /bin/busybox chroot / /bin/busybox echo changed; /bin/busybox unshare -m true; /bin/busybox pidof sleep")
	for _, c := range []string{"CapPrm:", "CapEff:", "CapBnd:"} { // without SYS_ADMIN (21), SYS_RESOURCE (24) and SETPCAP (8)
		if !strings.Contains(got, c+"\t00000000000404fb") && !strings.Contains(got, c+"\t00000000000400fb") {
			t.Errorf("root's capabilities: %s: want Docker's without those left out: %q", c, got)
			break
		}
	}
	if strings.Count(got, "ermi") < 2 || !strings.Contains(got, "changed\n") { // "permission denied", "Operation not permitted"
		t.Errorf("root could mount or make a namespace, or not change its root: %q, %v", got, err)
	}
	if err := f.Kill(t.Context(), who, free.ID); err != nil {
		t.Error(err)
	}

	s := confined(t, f, who, "t", sandbox.Request{Processes: 64}, sandbox.Confinement{
		Read:  []string{"/home/user/project", "/data", "/nowhere"},
		Write: []string{"/work", "/work/deep/out"},
		Deny:  []string{"/home/user/project/link", "/work/.git/hooks", "/etc/doomed"},
	}, map[string]string{"/work/in/a.csv": "1,2\n", "/inputs/b": "three\n"})

	for name, tt := range map[string]struct{ script, want string }{
		"credentials":                   {"/bin/busybox grep -E 'Uid|Gid|CapEff|CapBnd|NoNew' /proc/self/status; echo $HOME $PWD", "Uid:\t65321\t65321\t65321\t65321\nGid:\t65321\t65321\t65321\t65321\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\n/work /work"},
		"nothing else runs":             {"/bin/busybox ps | /bin/busybox grep -c '[s]leep [12]'", "0"},
		"the root":                      {"ls /", "bin\ndata\ndev\netc\nhome\ninputs\nproc\nsys\nusr\nwork"},
		"homes":                         {"ls -a /home/user", ".\n..\nproject"},
		"the guest's files":             {"ls /run; cat /usr/local/sbin/postern-guest", "ls: /run: No such file or directory\ncat: can't open '/usr/local/sbin/postern-guest': Permission denied"},
		"a read path":                   {"cat /home/user/project/main.go /data/list", "package main\na list"},
		"a denied path":                 {"cat /etc/doomed; ls -l /etc/doomed | /bin/busybox cut -c1-10", "cat: can't open '/etc/doomed': Permission denied\n----------"},
		"a denied link, and its target": {"cat /home/user/project/link/key; cat /data/private/key; ls /data/private", "cat: can't open '/home/user/project/link/key': Permission denied\ncat: can't open '/data/private/key': Permission denied\nls: can't open '/data/private': Permission denied"},
		"a denied path to be created":   {"echo x > /work/.git/hooks/post; /bin/busybox mv /work/.git /work/g; ls /work/.git/hooks", "/bin/sh: can't create /work/.git/hooks/post: Permission denied\nmv: can't rename '/work/.git': Device or resource busy\nls: can't open '/work/.git/hooks': Permission denied"},
		"writes":                        {"echo x > /etc/x; echo x > /usr/share/open/x; echo x > /data/x; echo x >> /data/list; echo x > /home/x; echo x > /x; echo x > /dev/x; echo x > /dev/shm/x; echo x > /tmp/x; echo x > /sys/x", "/bin/sh: can't create /etc/x: Permission denied\n/bin/sh: can't create /usr/share/open/x: Read-only file system\n/bin/sh: can't create /data/x: Permission denied\n/bin/sh: can't create /data/list: Permission denied\n/bin/sh: can't create /home/x: Permission denied\n/bin/sh: can't create /x: Permission denied\n/bin/sh: can't create /dev/x: Permission denied\n/bin/sh: can't create /dev/shm/x: nonexistent directory\n/bin/sh: can't create /tmp/x: nonexistent directory\n/bin/sh: can't create /sys/x: Permission denied"},
		"unlink and rename":             {"/bin/busybox rm /data/list; /bin/busybox mv /data/list /data/l; /bin/busybox mv /data/list /work/l; /bin/busybox rm -f /work/l; ls /data", "rm: can't remove '/data/list': Permission denied\nmv: can't rename '/data/list': Read-only file system\nmv: can't preserve ownership of '/work/l': Operation not permitted\nmv: can't remove '/data/list': Permission denied\nlist\nprivate"},
		"links to outside":              {"/bin/busybox ln /data/list /work/hard; /bin/busybox ln -s /etc/doomed /work/soft; cat /work/soft", "ln: /work/hard: Invalid cross-device link\ncat: can't open '/work/soft': Permission denied"},
		"an input":                      {"cat /work/in/a.csv /inputs/b; echo x > /work/in/a.csv; /bin/busybox rm -f /work/in/a.csv; /bin/busybox mv /work/in /work/i; echo x > /work/in/more; cat /work/in/a.csv", "1,2\nthree\n/bin/sh: can't create /work/in/a.csv: Permission denied\nrm: can't remove '/work/in/a.csv': Permission denied\nmv: can't rename '/work/in': Device or resource busy\n/bin/sh: can't create /work/in/more: Permission denied\n1,2"},
		"the inputs' source":            {"ls /.inputs", "ls: /.inputs: No such file or directory"},
		"mounts":                        {"/bin/busybox mount -t tmpfs x /work; /bin/busybox umount /etc/doomed; /bin/busybox umount -l /work/.git/hooks; /bin/busybox mount -o remount,rw /etc", "mount: permission denied (are you root?)\numount: can't unmount /etc/doomed: Operation not permitted\numount: can't unmount /work/.git/hooks: Operation not permitted\nmount: permission denied (are you root?)"},
		"namespaces":                    {"/bin/busybox unshare -U true; /bin/busybox unshare -Urm true; /bin/busybox unshare -n true; /bin/busybox chroot /work true; /bin/busybox nsenter -t 1 -m true", "unshare: unshare(0x10000000): Operation not permitted\nunshare: unshare(0x10020000): Operation not permitted\nunshare: unshare(0x40000000): Operation not permitted\nchroot: can't change root directory to '/work': Operation not permitted\nnsenter: setns(): can't reassociate to namespace 'mnt': Operation not permitted"},
		"proc":                          {"G=$(/bin/busybox pidof postern-guest); for p in $G; do ls /proc/$p/root /proc/$p/cwd /proc/$p/fd; cat /proc/$p/environ /proc/$p/mem; for n in $(/bin/busybox seq 0 40); do cat /proc/$p/fd/$n; ls /proc/$p/fd/$n/; done; /bin/busybox kill -9 $p; done 2>&1 | /bin/busybox grep -vE 'ermission denied|not permitted|No such file|/fd:$'", ""},
		"a set-user-ID program":         {"/bin/busybox su -c id; /bin/busybox grep Uid /proc/self/status", "su: must be suid to work properly\nUid:\t65321\t65321\t65321\t65321"},
		"devices":                       {"/bin/busybox mknod /work/null c 1 3; echo x > /dev/null && /bin/busybox head -c 4 /dev/urandom | /bin/busybox wc -c", "mknod: /work/null: Operation not permitted\n4"},
		"descriptors":                   {"ls /proc/self/fd | /bin/busybox tr '\\n' ' '; for f in 0 1 2; do /bin/busybox readlink /proc/self/fd/$f | /bin/busybox sed 's/[0-9]//g'; done", "0 1 2 3 /dev/null\npipe:[]\npipe:[]"},
		"the guest's port":              {"/bin/busybox wget -q -O - http://127.0.0.1:49983/envs 2>&1; /bin/busybox wget -q -O - --post-data={} http://127.0.0.1:49983/run/kill?pid=0 2>&1", "wget: server returned error: HTTP/1.1 401 Unauthorized\nwget: server returned error: HTTP/1.1 401 Unauthorized"},
		"a file as large as the disk":   {"/bin/busybox dd if=/dev/zero of=/work/big bs=1M count=100 2>&1 | /bin/busybox head -1; /bin/busybox rm /work/big", "dd: error writing '/work/big': No space left on device"},
	} {
		t.Run(name, func(t *testing.T) {
			if got, _ := within(t, f, s.ID, tt.script); got != tt.want && name != "writes" {
				t.Errorf("%s\ngot:  %s\nwant: %s", tt.script, got, tt.want)
			} else if name == "writes" {
				if lines := strings.Split(got, "\n"); len(lines) != 10 {
					t.Errorf("got %s\nwant an error for each write", got)
				}
			}
		})
	}

	t.Run("over the data plane", func(t *testing.T) {
		for _, user := range []string{"", "root", "user"} {
			got, err := runIn(t, f, s.ID, user, "/bin/sh", "-c", "/bin/busybox whoami; pwd; ls /run /home/user/.netrc 2>&1; true")
			if err != nil || got != "run\n/work\nls: /run: No such file or directory\nls: /home/user/.netrc: No such file or directory" {
				t.Errorf("as %q: %q, %v", user, got, err)
			}
		}
		client := &http.Client{Transport: channel{f, s.ID, "root"}}
		const bound = "the sandbox is bound by contract job@sha256:1; files leave as artifacts of the run"
		for _, tt := range []struct {
			method, path, body string
			want               int
			has, lacks         string
		}{
			{"POST", "/files/compose", "{}", 403, bound, ""},
			{"POST", "/filesystem.Filesystem/CreateWatcher", `{"path":"/"}`, 403, bound, ""},
			{"POST", "/filesystem.Filesystem/WatchDir", `{"path":"/"}`, 403, bound, ""},
			{"POST", "/warm", "", 403, bound, ""},
			{"POST", "/template/start", `{"cmd":"true"}`, 403, bound, ""},
			// Files are those of the view, with the rights of its user, whoever asks.
			{"GET", "/files?path=/etc/passwd&username=root", "", 200, "run:x:65321:", ""},
			{"GET", "/files?path=/etc/doomed&username=root", "", 403, "", ""},
			{"GET", "/files?path=/data/private/key", "", 403, "", ""},
			{"GET", "/files?path=/home/user/project/link/key", "", 403, "", ""},
			{"GET", "/files?path=/home/user/.netrc", "", 404, "", ""},
			{"GET", "/files?path=/run/postern/state", "", 404, "", ""},
			{"GET", "/files?path=/usr/local/sbin/postern-guest", "", 403, "", ""},
			{"GET", "/files?path=/proc/1/environ", "", 403, "", ""},
			{"POST", "/files?path=/work/over-the-api", "x", 200, "over-the-api", ""},
			{"POST", "/files?path=/work/in/a.csv", "x", 403, "", ""},
			{"POST", "/files?path=/etc/x", "x", 403, "", ""},
			{"POST", "/files?path=/data/list", "x", 403, "", ""},
			{"POST", "/files?path=/new/x&username=user", "x", 403, "", ""},
			{"POST", "/filesystem.Filesystem/ListDir", `{"path":"/"}`, 200, `"/work"`, `"/run"`},
			{"POST", "/filesystem.Filesystem/ListDir", `{"path":"/home/user"}`, 200, "project", "netrc"},
			{"POST", "/filesystem.Filesystem/Remove", `{"path":"/etc/passwd"}`, 403, "", ""},
			{"POST", "/filesystem.Filesystem/Move", `{"source":"/work/over-the-api","destination":"/opt/x"}`, 403, "", ""},
			{"POST", "/filesystem.Filesystem/Remove", `{"path":"/work/over-the-api"}`, 200, "", ""},
		} {
			req, err := http.NewRequestWithContext(t.Context(), tt.method, fmt.Sprintf("http://%s:%d%s", s.ID, sandbox.GuestPort, tt.path), strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			if strings.HasPrefix(tt.path, "/files?") {
				req.Header.Set("Content-Type", "application/octet-stream")
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != tt.want || !strings.Contains(string(b), tt.has) || tt.lacks != "" && strings.Contains(string(b), tt.lacks) {
				t.Errorf("%s %s %s: %d %s, want %d %q", tt.method, tt.path, tt.body, resp.StatusCode, b, tt.want, tt.has)
			}
		}
		if _, err := f.Dial(t.Context(), s.ID, 8080); !errors.Is(err, sandbox.ErrBound) {
			t.Errorf("another port: %v", err)
		}
		if tr, ok := f.Traffic(s.ID); !ok || tr.Contract != s.Contract {
			t.Errorf("traffic: %+v, %v", tr, ok)
		}
	})

	t.Run("operations that its owner is refused", func(t *testing.T) {
		_, serr := f.Snapshot(t.Context(), who, s.ID, "")
		_, ferr := f.Fork(t.Context(), who, s.ID, time.Minute, 1)
		_, _, cerr := f.Connect(t.Context(), who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, Reboot: true})
		for name, err := range map[string]error{
			"snapshot": serr, "fork": ferr, "reboot": cerr, "pause of files": f.Pause(t.Context(), who, s.ID, true),
			"network": f.SetEgress(t.Context(), who, s.ID, policy.Egress{Internet: true}),
		} {
			if !errors.Is(err, sandbox.ErrBound) || !errors.Is(err, auth.ErrForbidden) || !strings.Contains(err.Error(), s.Contract) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := f.PutFile(t.Context(), s.ID, "/work/late", strings.NewReader("x")); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("an input after the first command: %v", err)
		}
		if err := f.Confine(t.Context(), s.ID, sandbox.Confinement{Write: []string{"/all"}}); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("a second view: %v", err)
		}
	})

	t.Run("commands", func(t *testing.T) {
		if _, e := within(t, f, s.ID, "exit 7"); e.Code != 7 || e.Signal != 0 || e.PID < 2 {
			t.Errorf("exit 7: %+v", e)
		}
		if _, e := within(t, f, s.ID, "kill -9 $$"); e.Code != 137 || e.Signal != 9 {
			t.Errorf("a signal: %+v", e)
		}
		for want, args := range map[int][]string{126: {"/data/list"}, 127: {"no-such-program"}} {
			if e, err := f.RunCommand(t.Context(), s.ID, sandbox.Command{Args: args}, func(byte, []byte) error { return nil }); err != nil || e.Code != want || e.PID != 0 || e.Reason == "" {
				t.Errorf("%q: %+v, %v", args, e, err)
			}
		}
		// Output is sent no faster than the caller reads it, and the caller may end the command.
		full := errors.New("too much")
		n := 0
		if _, err := f.RunCommand(t.Context(), s.ID, sandbox.Command{Args: []string{"/bin/busybox", "yes"}}, func(_ byte, p []byte) error {
			if n += len(p); n > 1<<20 {
				return full
			}
			return nil
		}); !errors.Is(err, full) {
			t.Errorf("a flood: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if _, err := f.RunCommand(ctx, s.ID, sandbox.Command{Args: []string{"/bin/sh", "-c", "trap '' TERM; sleep 34567; sleep 34568"}}, func(byte, []byte) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a time-out: %v", err)
		}
		begin := time.Now()
		if got, e := within(t, f, s.ID, "/bin/busybox setsid sleep 45678 & echo started"); got != "started" || e.Code != 0 || time.Since(begin) > 20*time.Second {
			t.Errorf("a daemon that holds the output: %q %+v %v", got, e, time.Since(begin))
		}
		if got, _ := within(t, f, s.ID, "for i in $(/bin/busybox seq 300); do n=$(/bin/busybox ps | /bin/busybox grep -E 'yes|3456[78]' | /bin/busybox grep -vc grep); [ $n = 0 ] && break; sleep 0.1; done; echo $n"); got != "0" {
			t.Errorf("%s processes of cancelled commands are left", got)
		}
	})

	t.Run("files", func(t *testing.T) {
		within(t, f, s.ID, `mkdir -p /work/out/a/b /work/deep/out/x && cd /work/out && for n in report.csv .hidden.csv a/deep.csv a/b/deeper.csv; do echo $n > $n; done
			ln -s /etc/passwd link.csv; ln -s /data /work/out/dir.csv; ln -s /data linked; /bin/busybox mkfifo pipe.csv; mkdir real.csv; echo x > "$(printf 'new\nline\377.csv')"; echo secret > closed.csv; /bin/busybox chmod 0 closed.csv
			/bin/busybox truncate -s 1099511627776 holes.csv; /bin/busybox nc -lU sock.csv & sleep 0.2; kill $!; /bin/busybox mv /work/deep /work/moved; ln -s /etc /work/deep`)
		names := func(most int, patterns ...string) (string, error) {
			fs, err := f.ListFiles(t.Context(), s.ID, patterns, most)
			var out []string
			for _, e := range fs {
				out = append(out, e.Path)
			}
			return strings.Join(out, " "), err
		}
		for pattern, want := range map[string]string{
			"/work/out/*.csv": "/work/out/.hidden.csv /work/out/closed.csv /work/out/holes.csv /work/out/new\nline\xff.csv /work/out/report.csv",
			"/work/out/*/*":   "/work/out/a/deep.csv",
			"/work/out/a/**":  "/work/out/a/b/deeper.csv /work/out/a/deep.csv",
			"/work/linked/*":  "", "/work/out/linked/*": "", "/work/in/*": "", "/etc/*": "", "/work/deep/out/*": "", "/work/out/dir.csv/**": "", "/data/**": "",
		} {
			if got, err := names(100, pattern); got != want || err != nil {
				t.Errorf("%s: got %q, %v, want %q", pattern, got, err, want)
			}
		}
		if _, err := names(3, "/work/out/*.csv"); !errors.Is(err, sandbox.ErrFull) {
			t.Errorf("more files than allowed: %v", err)
		}
		read := func(path string, most int64) (string, error) {
			r, err := f.OpenFile(t.Context(), s.ID, path, most)
			if err != nil {
				return "", err
			}
			defer r.Close()
			b, err := io.ReadAll(r)
			return string(b), err
		}
		for path, want := range map[string]string{"/work/out/report.csv": "report.csv\n", "/work/out/new\nline\xff.csv": "x\n", "/work/out/closed.csv": "secret\n"} {
			if got, err := read(path, 100); got != want || err != nil {
				t.Errorf("%q: got %q, %v", path, got, err)
			}
		}
		for _, path := range []string{
			"/work/out/link.csv", "/work/out/linked/list", "/work/deep/passwd", "/work/deep/out/../passwd", "/work/out/pipe.csv", "/work/out/sock.csv", "/work/out/real.csv", "/etc/passwd", "/proc/self/environ",
			"/work/in/a.csv", "/work", "work/out/report.csv", "/work/out/nothing", "/work/.git/hooks/x", "/run/postern/view/write/0/out/report.csv",
		} {
			if got, err := read(path, 100); !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("%s: got %q, %v", path, got, err)
			}
		}
		for _, path := range []string{"/work/out/holes.csv", "/work/out/report.csv"} {
			if got, err := read(path, 5); !errors.Is(err, sandbox.ErrFull) {
				t.Errorf("%s: got %q, %v", path, got, err)
			}
		}
	})

	t.Run("killing", func(t *testing.T) {
		within(t, f, s.ID, "for i in 1 2 3; do (trap '' TERM HUP INT; /bin/busybox setsid /bin/sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' &) ; done; bomb() { while :; do bomb & done; }; (bomb 2>/dev/null &) ; sleep 1")
		begin := time.Now()
		if err := f.KillAll(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
		t.Logf("a bomb and daemons killed in %v", time.Since(begin))
		if got, _ := within(t, f, s.ID, "/bin/busybox ps | /bin/busybox grep -c ' run '"); got != "3" && got != "2" {
			t.Errorf("%s processes are left, including this command's", got)
		}
	})

	t.Run("after a pause", func(t *testing.T) {
		if err := f.Pause(t.Context(), who, s.ID, false); err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.Connect(t.Context(), who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		if got, _ := within(t, f, s.ID, "/bin/busybox whoami; ls /; cat /etc/doomed /data/private/key; cat /work/in/a.csv; /bin/busybox unshare -U true; echo x > /work/after && cat /work/after"+" 2>&1"); !strings.HasPrefix(got, "run\nbin\ndata\n") || strings.Contains(got, "the key") || !strings.HasSuffix(got, "1,2\nunshare: unshare(0x10000000): Operation not permitted\nx") {
			t.Errorf("got %q", got)
		}
	})
}

// A doorkeeper holds the program at one path until it is told the verdict, and allows all
// others.
type doorkeeper struct {
	held    string      // path of the program to hold
	asked   chan string // receives the name of each held program
	verdict chan bool   // the verdict on each held program
	seen    func(sandbox.Exec)
}

func (d *doorkeeper) Exec(ctx context.Context, _ auth.Principal, e sandbox.Exec) bool {
	d.seen(e)
	if e.Path != d.held {
		return true
	}
	d.asked <- e.Name
	select {
	case ok := <-d.verdict:
		return ok
	case <-ctx.Done():
		return false
	}
}
func (d *doorkeeper) Exited(auth.Principal, sandbox.Exit) {}
func (d *doorkeeper) Opened(auth.Principal, sandbox.Open) {}
func (d *doorkeeper) Missed(auth.Principal, uint64)       {}

// TestHeldCommandBlocksNothingElse: a command that waits for a person blocks neither the
// guest nor other commands, and ends when its caller goes.
func TestHeldCommandBlocksNothingElse(t *testing.T) {
	needRoot(t)
	root := withBusybox(t, distroless(t))
	if err := os.Rename(filepath.Join(root, "bin/tool"), filepath.Join(root, "bin/held")); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var seen []string
	d := &doorkeeper{held: "/bin/held", asked: make(chan string, 10), verdict: make(chan bool), seen: func(e sandbox.Exec) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, e.Path)
	}}
	f, who, _ := newFleet(t, map[string]sandbox.Base{"t": {Rootfs: root, Key: "held", User: "user"}}, func(c *sandbox.Config) { c.Commands = d })
	s := confined(t, f, who, "t", sandbox.Request{}, sandbox.Confinement{Write: []string{"/work"}}, nil)
	run := func(ctx context.Context) (sandbox.Ended, error) {
		return f.RunCommand(ctx, s.ID, sandbox.Command{Args: []string{"held", "euid"}}, func(byte, []byte) error { return nil })
	}
	for _, tt := range []struct {
		allow bool
		code  int
	}{{true, 0}, {false, 126}} {
		ended := make(chan sandbox.Ended, 1)
		go func() {
			e, err := run(t.Context())
			if err != nil {
				t.Error(err)
			}
			ended <- e
		}()
		<-d.asked
		for range 3 { // the guest collects garbage more than once meanwhile
			if got, e := within(t, f, s.ID, "/bin/busybox seq 1 20000 | /bin/busybox tail -1"); got != "20000" || e.Code != 0 {
				t.Errorf("another command: %q %+v", got, e)
			}
		}
		d.verdict <- tt.allow
		if e := <-ended; e.Code != tt.code || (e.PID == 0) == tt.allow {
			t.Errorf("allowed %v: %+v", tt.allow, e)
		}
	}
	// The caller goes while its command is held.
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := run(ctx)
		gone <- err
	}()
	<-d.asked
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled caller: %v", err)
	}
	go func() { _, err := run(t.Context()); gone <- err }()
	<-d.asked
	if err := f.KillAll(t.Context(), s.ID); err != nil {
		t.Errorf("kill a held command: %v", err)
	}
	if err := <-gone; err != nil {
		t.Error(err)
	}
	if got, _ := within(t, f, s.ID, "/bin/busybox ps | /bin/busybox grep -c '[.]postern-start\\|[h]eld'"); got != "0" {
		t.Errorf("%s held processes are left", got)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Contains(seen, sandbox.StarterPath) || !slices.Contains(seen, "/bin/busybox") {
		t.Errorf("seen: %q", seen)
	}
}
