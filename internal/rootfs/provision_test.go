package rootfs_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"postern/internal/rootfs"
)

// read returns the content of a file in a tree; "" if there is none.
func read(t testing.TB, tree *rootfs.Tree, name string) string {
	t.Helper()
	b, err := tree.ReadFile(name, 1<<20)
	if err != nil && !errors.Is(err, rootfs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

func TestEveryImageBecomesASandbox(t *testing.T) {
	const (
		root  = "root:x:0:0:root:/root:/bin/bash\n"
		node  = "node:x:1000:1000::/home/node:/bin/bash\n"
		added = "user:x:1000:1000::/home/user:"
	)
	for _, tt := range []struct {
		name   string
		image  []entry
		passwd string
		home   string // its owner
		files  map[string]string
	}{
		{
			"with nothing inside", nil, "root:x:0:0:root:/root:/bin/sh\n" + added + "/bin/sh\n", "1000:1000",
			map[string]string{
				"/etc/group": "root:x:0:\nuser:x:1000:\n", "/etc/shadow": "root:!::0:99999:7:::\nuser:!::0:99999:7:::\n",
				"/etc/hostname": "sandbox\n", "/etc/ssl/certs/ca-certificates.crt": "",
				"/etc/sudoers.d/postern": "user ALL=(ALL:ALL) NOPASSWD: ALL\nDefaults !syslog\n",
			},
		},
		{
			"like Debian's, with a shell and skel",
			[]entry{
				file("etc/passwd", root), file("etc/shadow", "root:*:1::::::\n").mode(0o640).owner(0, 42), file("etc/gshadow", "root:*::\n"),
				file("usr/bin/bash", "ELF").mode(0o755), link("bin", "usr/bin"), file("etc/skel/.profile", "P"), file("etc/ssl/certs/ca-certificates.crt", "CA"),
				link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
			},
			root + added + "/bin/bash\n", "1000:1000",
			map[string]string{
				"/etc/shadow": "root:*:1::::::\nuser:!::0:99999:7:::\n", "/etc/gshadow": "root:*::\nuser:!::\n", "/home/user/.profile": "P",
				"/etc/ssl/certs/ca-certificates.crt": "CA", "/etc/resolv.conf": "nameserver 10.0.0.1\noptions timeout:5 attempts:2\n",
				"/run/systemd/resolve/stub-resolv.conf": "",
			},
		},
		{
			"whose user 1000 is another",
			[]entry{file("etc/passwd", root+strings.TrimSuffix(node, "\n")), file("etc/group", "node:x:1000:\n")},
			root + node + "user:x:1001:1001::/home/user:/bin/sh\n", "1001:1001",
			map[string]string{"/etc/group": "node:x:1000:\nroot:x:0:\nuser:x:1001:\n"},
		},
		{
			"whose group has the name already",
			[]entry{file("etc/passwd", root), file("etc/group", "root:x:0:\nuser:x:77:\n")},
			root + "user:x:1000:77::/home/user:/bin/sh\n", "1000:77",
			map[string]string{"/etc/group": "root:x:0:\nuser:x:77:\n"},
		},
		{
			"with the user",
			[]entry{file("etc/passwd", root+"user:x:1234:5::/srv:/bin/zsh\n")},
			root + "user:x:1234:5::/srv:/bin/zsh\n", "", nil,
		},
		{
			"with links instead of directories", []entry{
				link("etc", "usr/etc"), link("home", "var/home"), link("tmp", "/var/tmp"), file("usr/share/passwd", root), link("usr/etc/passwd", "../share/passwd"),
			}, root + added + "/bin/sh\n", "1000:1000", map[string]string{"/usr/etc/hostname": "sandbox\n", "/usr/share/passwd": root + added + "/bin/sh\n"},
		},
		{
			"of Red Hat",
			[]entry{file("etc/pki/tls/certs/ca-bundle.crt", "RH"), link("etc/ssl/certs", "../pki/tls/certs")},
			"root:x:0:0:root:/root:/bin/sh\n" + added + "/bin/sh\n", "1000:1000",
			map[string]string{"/etc/ssl/certs/ca-certificates.crt": "RH"},
		},
		{
			"with links and files at the mount points",
			[]entry{link("proc", "/etc"), file("sys", "x"), dir("run"), link("run/postern", "/home"), link("run/e2b", "e2b")},
			"root:x:0:0:root:/root:/bin/sh\n" + added + "/bin/sh\n", "1000:1000", nil,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tree := made(t, tt.image)
			if err := tree.Provision(); err != nil {
				t.Fatal(err)
			}
			if got := read(t, tree, "/etc/passwd"); got != tt.passwd {
				t.Errorf("passwd: got %q, want %q", got, tt.passwd)
			}
			for name, want := range tt.files {
				if got := read(t, tree, name); got != want {
					t.Errorf("%s: got %q, want %q", name, got, want)
				}
			}
			got := listed(t, tree)
			for name, want := range map[string]string{
				"/proc": "40755 0:0", "/sys": "40755 0:0", "/dev": "40755 0:0", "/run": "40755 0:0", "/run/postern": "40755 0:0", "/run/e2b": "40755 0:0",
				"/var/tmp": "41777 0:0", "/usr/local": "41775 0:", "/usr/local/bin": "40755 1",
			} {
				if !strings.HasPrefix(got[name], want) {
					t.Errorf("%s: got %q, want %q", name, got[name], want)
				}
			}
			if tt.home != "" {
				home, code := got["/home/user"], got["/code"]
				if home == "" {
					home = got["/var/home/user"]
				}
				if home != "40755 "+tt.home+" 0" || code != "40777 "+tt.home+" 0" {
					t.Errorf("/home/user: %q, /code: %q", home, code)
				}
			}
			if err := tree.Provision(); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got, listed(t, tree)); d != "" {
				t.Errorf("once more (-want +got)\n%s", d)
			}
		})
	}
}

// TestHostileImagesAreNotProvisioned: nothing of the host is at stake, but an image
// must not take the server's memory, or become one whose sandboxes do not start.
func TestHostileImagesAreNotProvisioned(t *testing.T) {
	for _, tt := range []struct {
		name  string
		image []entry
		want  string
	}{
		{"a large table", []entry{file("etc/passwd", strings.Repeat("x", 1<<20+1))}, "at most 1048576"},
		{"a table that is a directory", []entry{dir("etc"), dir("etc/passwd")}, "not a regular file"},
		{"a table that is a loop", []entry{link("etc/group", "group")}, "symbolic links"},
		{"a directory that is a file", []entry{file("etc", "x")}, "not a directory"},
		{"a directory that leads to itself", []entry{link("tmp", "tmp")}, "symbolic links"},
		{"a file that is a directory", []entry{dir("etc"), dir("etc/hosts")}, "is a directory"},
		{"an account without an ID", []entry{file("etc/passwd", "user:x:many:1::/:/bin/sh\n")}, "no ID"},
		{"an account with an ID of 64 bits", []entry{file("etc/passwd", "user:x:18446744073709551615:1::/:/bin/sh\n")}, "no ID"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := made(t, tt.image).Provision(); !errors.Is(err, rootfs.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
	t.Run("a home that is in its own pattern", func(t *testing.T) {
		tree := made(t, []entry{dir("etc"), dir("etc/skel"), file("etc/skel/a", "A"), link("home", "/etc/skel")})
		if err := tree.Provision(); err != nil {
			t.Fatal(err)
		}
		if got := listed(t, tree); got["/etc/skel/user"] == "" || got["/etc/skel/user/a"] == "" || got["/etc/skel/user/user"] != "" {
			t.Errorf("got %v", got)
		}
	})
	t.Run("another name of a table", func(t *testing.T) {
		tree := made(t, []entry{file("keep", "root:x:0:0:root:/root:/bin/sh\n"), hard("etc/passwd", "keep")})
		if err := tree.Provision(); err != nil {
			t.Fatal(err)
		}
		if got := read(t, tree, "/keep"); strings.Contains(got, "user") {
			t.Errorf("got %q", got)
		}
	})
}
