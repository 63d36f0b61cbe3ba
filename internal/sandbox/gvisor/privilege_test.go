package gvisor

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

// needsPatches says how to build a test of what gVisor does only with the patches in
// patches/gvisor.
func needsPatches(t *testing.T) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Log("plain go test builds gVisor without the patches in patches/gvisor, and this test then fails: make unit PKG=./internal/sandbox/gvisor RUN=" + t.Name())
		}
	})
}

// Values of security.capability: cap_setuid=ep of root, and of the root of a user namespace
// who is user 1000 outside.
const (
	setuidCapability       = "0100000280000000000000000000000000000000"
	setuidCapabilityOf1000 = "0100000380000000000000000000000000000000e8030000"
)

// TestNobodyGivesThemselvesCapabilities: a user without sudo gave a copy of a program
// cap_setuid and became root inside. CAP_SETFCAP is needed for that on Linux. Root inside
// does not have it; root of a user namespace has, but only for that namespace.
func TestNobodyGivesThemselvesCapabilities(t *testing.T) {
	needRoot(t)
	needsPatches(t)
	r := newRuntime(t, t.TempDir())
	volume := t.TempDir()
	if err := unix.Chmod(volume, 0o777); err != nil {
		t.Fatal(err)
	}
	_, h := start(t, r, func(s *sandbox.Spec) {
		s.Mounts = append(s.Mounts, sandbox.Mount{Source: volume, Destination: "/data"})
	})
	const capability = "security.capability"
	refused := func(got string) bool {
		return strings.Contains(got, "error: operation not permitted") || strings.Contains(got, "error: operation not supported")
	}
	calls := []string{"setxattr", "lsetxattr", "fsetxattr"}
	for _, on := range []struct{ name, dir string }{{"root file system", "/tmp"}, {"tmpfs", "/dev/shm"}, {"volume", "/data"}} {
		t.Run(on.name, func(t *testing.T) {
			do := func(uid int, args ...string) string { t.Helper(); return h.do(t, uid, args...) }
			quiet := func(uid int, args ...string) {
				t.Helper()
				if got := do(uid, args...); got != "" {
					t.Errorf("user %d, %q: got %q", uid, args, got)
				}
			}
			own := filepath.Join(on.dir, "own")
			quiet(1000, "change", "copy", own)
			for _, call := range calls {
				for _, uid := range []int{1000, 0} {
					for _, value := range []string{setuidCapability, setuidCapabilityOf1000, strings.Replace(setuidCapability, "01", "00", 1)} {
						if got := do(uid, "attribute", call, own, capability, value); !refused(got) {
							t.Errorf("%s of %s by user %d: got %q, want that it is refused", call, value, uid, got)
						}
					}
					for _, name := range []string{"security.selinux", "security.ima", "security.evm", "security.SMACK64", "security.other", "trusted.other", "trusted.overlay.opaque", "system.other", "other"} {
						if got := do(uid, "attribute", call, own, name, "30"); !refused(got) {
							t.Errorf("%s of %s by user %d: got %q, want that it is refused", call, name, uid, got)
						}
					}
				}
				quiet(1000, "attribute", call, own, "user."+call, "30")
			}
			if got := do(1000, "exec", own, "becomeroot"); !refused(got) {
				t.Errorf("become root: got %q, want that it is refused", got)
			}
			if got := do(1000, "attribute", "setxattr", "/usr/local/sbin/postern-guest", capability, setuidCapability); !strings.Contains(got, "error:") {
				t.Errorf("set it on root's file: got %q, want that it is refused", got)
			}
			quiet(1000, "attribute", "removexattr", own, "user.setxattr")
			if got := strings.Fields(strings.Trim(do(1000, "attribute", "listxattr", own), "[]")); slices.Contains(got, capability) || slices.Contains(got, "user.setxattr") || !slices.Contains(got, "user.lsetxattr") {
				t.Errorf("attributes: got %q, want user.lsetxattr and user.fsetxattr", got)
			}
		})
	}
	// Root of a user namespace may, since its file then has privileges only there.
	for _, on := range []struct{ name, dir string }{{"root file system", "/tmp"}, {"tmpfs", "/dev/shm"}} {
		t.Run("in a user namespace, on the "+on.name, func(t *testing.T) {
			do := func(uid int, args ...string) string { t.Helper(); return h.do(t, uid, args...) }
			inside := func(args ...string) string {
				t.Helper()
				return do(1000, slices.Concat([]string{"usernsroot"}, args)...)
			}
			for i, call := range calls {
				file := filepath.Join(on.dir, call)
				do(1000, "change", "copy", file)
				if got := inside("attribute", call, file, capability, setuidCapability); got != "" {
					t.Fatalf("%s: got %q, want that it is allowed", call, got)
				}
				if got, want := do(1000, "attribute", "getxattr", file, capability), setuidCapabilityOf1000; got != want {
					t.Errorf("%s: got %s, want %s, bound to the namespace", call, got, want)
				}
				if got := do(1000, "exec", file, "becomeroot"); !refused(got) {
					t.Errorf("become root outside: got %q, want that it is refused", got)
				}
				// Its owner needs CAP_SETFCAP to remove it, which makes the file another program.
				remove := []string{"removexattr", "lremovexattr", "fremovexattr"}[i]
				for _, uid := range []int{0, 1000} {
					if got := do(uid, "attribute", remove, file, capability); !refused(got) {
						t.Errorf("%s by user %d: got %q, want that it is refused", remove, uid, got)
					}
				}
				if got := inside("attribute", remove, file, capability); got != "" {
					t.Errorf("%s in the namespace: got %q, want that it is allowed", remove, got)
				}
			}
			if got := inside("attribute", "setxattr", "/usr/local/sbin/postern-guest", capability, setuidCapability); !strings.Contains(got, "error:") {
				t.Errorf("set it on root's file: got %q, want that it is refused", got)
			}
			for _, change := range [][]string{{"append"}, {"truncate", "9"}, {"chown", "1000"}, {"fchown", "1000"}} {
				file := filepath.Join(on.dir, change[0])
				do(1000, "change", "copy", file)
				inside("attribute", "setxattr", file, capability, setuidCapability)
				if got := do(1000, "attribute", "listxattr", file); !strings.Contains(got, capability) {
					t.Errorf("attributes before %s: got %q, want %s", change[0], got, capability)
				}
				do(1000, slices.Concat([]string{"change", change[0], file}, change[1:])...)
				if got := do(1000, "attribute", "listxattr", file); got != "[]" {
					t.Errorf("attributes after %s: got %q, want none", change[0], got)
				}
			}
		})
	}
}

// TestCapabilitiesOfTheTemplateStay: a program that has capabilities on the host keeps them
// when a change of its mode copies it to the upper layer, and loses them when its content
// changes. Templates in images have no attributes; a directory may.
func TestCapabilitiesOfTheTemplateStay(t *testing.T) {
	needRoot(t)
	shared, err := rootfs()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "root")
	if err := os.CopyFS(dir, os.DirFS(shared)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "usr/local/sbin/postern-guest"), 0o755); err != nil {
		t.Fatal(err)
	}
	value, err := hex.DecodeString(setuidCapability)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(filepath.Join(dir, "usr/local/sbin/postern-guest"), "security.capability", value, 0); err != nil {
		t.Fatalf("this file system has no capabilities: %v", err)
	}
	r := newRuntime(t, t.TempDir())
	_, h := start(t, r, func(s *sandbox.Spec) { s.Rootfs, s.Image = dir, sandbox.Image{} })
	const program = "/usr/local/sbin/postern-guest"
	for _, change := range [][]string{{"mode", program}, {"chmod", program, "755"}} {
		h.do(t, 0, slices.Concat([]string{"change"}, change)...)
		if got, want := h.do(t, 1000, "exec", program, "becomeroot"), "euid 0"; got != want {
			t.Errorf("after %s: got %q, want %q", change[0], got, want)
		}
	}
	h.do(t, 0, "change", "append", program)
	if got := h.do(t, 1000, "exec", program, "becomeroot"); !strings.Contains(got, "error: operation not permitted") {
		t.Errorf("after a write: got %q, want that it has no capabilities", got)
	}
}

// TestNewOwnersInheritNoSetuid: a user's program with the setuid bit does not run as the
// owner whom root gives it to, also if somebody has it open meanwhile.
func TestNewOwnersInheritNoSetuid(t *testing.T) {
	needRoot(t)
	needsPatches(t)
	r := newRuntime(t, t.TempDir())
	_, h := start(t, r, nil)
	for _, dir := range []string{"/tmp", "/dev/shm"} {
		for _, how := range []string{"chown", "fchown"} {
			for _, is := range []string{"open", "closed"} {
				t.Run(how+" in "+dir+" of a file that is "+is, func(t *testing.T) {
					file := filepath.Join(dir, how+"-"+is)
					steps := []string{"0", "change", how, file, "0", ";", "1000", "exec", file, "euid", ";", "0", "change", "mode", file}
					hold := file
					if is == "closed" {
						hold = "/proc/self/exe"
					}
					if got := h.do(t, 1000, "change", "copy", file) + h.do(t, 1000, "change", "chmod", file, "6755"); got != "" {
						t.Fatal(got)
					}
					if got, want := h.do(t, 0, append([]string{"held", hold}, steps...)...), "1000\n755"; got != want {
						t.Errorf("got %q, want %q", got, want)
					}
				})
			}
		}
	}
	t.Run("truncate of a file that is open", func(t *testing.T) {
		h.do(t, 1000, "change", "copy", "/tmp/short")
		h.do(t, 1000, "change", "chmod", "/tmp/short", "6755")
		if got, want := h.do(t, 0, "held", "/tmp/short", "0", "change", "truncate", "/tmp/short", "9", ";", "0", "change", "mode", "/tmp/short"), "755"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// TestOwnFileSystemsGiveNoPrivileges: a user who serves a file system says whom its files
// belong to. Executed outside of the user namespace that mounted it, a file of root with the
// setuid bit, or one with a capability, must give nothing. gVisor refuses to execute any;
// if a later version executes them, this looks at what they get.
func TestOwnFileSystemsGiveNoPrivileges(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	_, h := start(t, r, nil)
	for _, privilege := range []string{"none", "setuid", "capability"} {
		t.Run(privilege, func(t *testing.T) {
			if got := h.do(t, 1000, "ownfilesystem", privilege); !strings.HasPrefix(got, "mounted\n") || strings.Contains(got, "euid") || !strings.Contains(got, "error:") {
				t.Errorf("got %q, want that it is mounted and gives no privileges", got)
			}
		})
	}
}
