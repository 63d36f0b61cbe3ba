package launch

import "testing"

func TestIsPart(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want bool
	}{
		{"nothing", nil, false},
		{"the program", []string{"postern"}, false},
		{"a path to it", []string{"/usr/bin/postern", "up"}, false},
		{"gVisor's commands as arguments", []string{"postern", "boot"}, false},
		{"and as a file's name", []string{"postern", "gofer", "umount", "--sync-fd=3", "/proc"}, false},
		{"a name as an argument", []string{"postern", "runsc-sandbox", "postern-launcher"}, false},
		{"umount by a person", []string{"postern", "umount", "--sync-fd=3", "/proc"}, false},
		{"something else of itself", []string{"/proc/self/exe", "up"}, false},
		{"umount of something else", []string{"/proc/self/exe", "umount", "--sync-fd=3", "/"}, false},
		{"the sentry", []string{"runsc-sandbox", "--root=/x", "boot"}, true},
		{"the gofer", []string{"runsc-gofer", "gofer"}, true},
		{"the launcher", []string{"postern-launcher"}, true},
		{"the umounter", []string{"/proc/self/exe", "umount", "--sync-fd=3", "/proc"}, true},
	} {
		if got := IsPart(c.args); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}
