package gvisor

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// guestArgs is the command line of the sandbox's first process.
var guestArgs = []string{"/usr/local/sbin/postern-guest", "init"}

// overheadMB is the memory for a sandbox's own kernel, in mebibytes, in addition to
// what the sandbox may use. The sentry and the gofer need 30 to 45 MiB with an idle
// guest. Each process inside needs about 0.9 MiB on the host, measured with 200 of
// them: a stub with its page tables, and the sentry's own tables.
func overheadMB(processes int64) int64 { return 96 + processes }

// capabilities are the rights of root inside: become other users, own, read and
// signal what belongs to them, and listen on low ports. That is enough for sudo,
// apt and pip. These capabilities of Docker's default set are left out:
//
//	NET_RAW   forged packets; the wall must know the source of each packet
//	MKNOD     devices
//	SETFCAP, AUDIT_WRITE   programs of agents do not need them, and they would make more
//	          of the sentry reachable
//
// SYS_CHROOT is for sshd and package managers; a root directory inside is no boundary.
// SYS_ADMIN is only for the guest, which mounts the view of files if a contract binds the
// sandbox. SYS_RESOURCE is only for the guest, which is then exempt from the limit on
// processes. Go's runtime ends a program that cannot start another thread, so a fork bomb of
// root would otherwise end the guest. SETPCAP lets the guest remove these and SETPCAP itself
// from the bounding set of everything that it starts, including sudo.
//
// All of them apply to the sandbox's own kernel, and none to the host.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
	"CAP_SETGID", "CAP_SETUID", "CAP_NET_BIND_SERVICE",
	"CAP_SYS_RESOURCE", "CAP_SETPCAP", "CAP_SYS_ADMIN", "CAP_SYS_CHROOT",
}

var idPattern = regexp.MustCompile(`^i[a-z0-9]{20}$`)

// check refuses a specification that must not become paths, cgroups and flags.
func check(s sandbox.Spec) error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: %s", sandbox.ErrInvalid, fmt.Sprintf(format, a...))
	}
	switch {
	case !idPattern.MatchString(s.ID):
		return bad("id %q is not \"i\" and 20 letters and digits", s.ID)
	case s.Link == nil:
		return bad("no link")
	case !filepath.IsAbs(s.Rootfs):
		return bad("rootfs %q is not an absolute path", s.Rootfs)
	case s.Image.Root != "" && !filepath.IsAbs(s.Image.Root):
		return bad("image %q is not an absolute path", s.Image.Root)
	case s.Image.Guest != "" && (!filepath.IsAbs(s.Image.Guest) || s.Image.Root == ""):
		return bad("image %q of the guest is not an absolute path, or without one of the root", s.Image.Guest)
	case len(s.Hostname) > 64 || strings.ContainsAny(s.Hostname, "\x00\n"):
		return bad("hostname is over 64 bytes or has a control character")
	}
	if err := checkLimits(s); err != nil {
		return err
	}
	for _, m := range s.Mounts {
		if !filepath.IsAbs(m.Source) {
			return bad("the source %q of a mount is not an absolute path", m.Source)
		}
		if err := checkDestination(m.Destination); err != nil {
			return err
		}
	}
	for i, m := range s.Mounts {
		for _, n := range s.Mounts[:i] {
			if m.Destination == n.Destination {
				return bad("two mounts at %q", m.Destination)
			}
		}
	}
	for _, e := range s.Env {
		if k, _, ok := strings.Cut(e, "="); !ok || k == "" || strings.ContainsRune(e, 0) {
			return bad("an entry of Env is not NAME=value")
		}
	}
	return nil
}

// checkLimits is the part of check that is about limits.
func checkLimits(s sandbox.Spec) error {
	const most = 1 << 30
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: %s", sandbox.ErrInvalid, fmt.Sprintf(format, a...))
	}
	switch {
	case !(s.CPUs >= 0.01 && s.CPUs <= 4096): // also false for NaN
		return bad("CPUs is %v, not between 0.01 and 4096", s.CPUs)
	case s.MemoryMB < 16 || s.MemoryMB > most:
		return bad("MemoryMB is %d, under 16 or too large", s.MemoryMB)
	case s.LargestMB < 0 || s.LargestMB > most:
		return bad("LargestMB is %d, negative or too large", s.LargestMB)
	case s.DiskMB < 1 || s.DiskMB > most:
		return bad("DiskMB is %d, under 1 or too large", s.DiskMB)
	case s.Processes < 8 || s.Processes > 1<<16:
		return bad("Processes is %d, not between 8 and 65536", s.Processes)
	}
	return nil
}

// reserved are directories of the sandbox itself. A mount on or in one of them
// would replace what the guest and the programs inside rely on.
var reserved = []string{"/proc", "/sys", "/dev", "/usr/local/sbin"}

func checkDestination(d string) error {
	bad := d == "/" || !filepath.IsAbs(d) || filepath.Clean(d) != d || len(d) > 1024 || strings.ContainsFunc(d, unicode.IsControl)
	for _, r := range reserved {
		bad = bad || d == r || strings.HasPrefix(d, r+"/") || strings.HasPrefix(r, d+"/")
	}
	if bad {
		return fmt.Errorf("%w: nothing can be mounted at %q", sandbox.ErrInvalid, d)
	}
	return nil
}

// hostLimits returns the limits of the cgroup. The limit on threads only prevents
// that a compromised sentry uses up the machine: the sandbox's own limit is
// enforced inside, see rlimits.
func hostLimits(s sandbox.Spec) limits {
	return limits{memory: (s.MemoryMB + 2*s.LargestMB + overheadMB(s.Processes)) << 20, pids: 256 + 4*s.Processes}
}

// ociSpec returns the specification for the sentry and the gofer. The sandbox's
// directory dir is where its writes go.
func ociSpec(s sandbox.Spec, rootfs, dir string) *specs.Spec {
	env := append(slices.Clone(s.Env),
		"POSTERN_MAX_PROCESSES="+strconv.FormatInt(s.Processes, 10),
		"POSTERN_MEMORY_MB="+strconv.FormatInt(s.MemoryMB, 10))
	if !slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, "PATH=") }) {
		env = append(env, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	}
	oomFirst := 1000
	spec := &specs.Spec{
		Version:  "1.0.2",
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: rootfs},
		Process: &specs.Process{
			Args: guestArgs, Cwd: "/", Env: env,
			Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
			Rlimits:      rlimits(s),
			// If the machine runs out of memory, the kernel kills a sandbox before
			// this server.
			OOMScoreAdj: &oomFirst,
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "mode=1777", "size=" + strconv.FormatInt(max(1, s.MemoryMB/2)<<20, 10)}},
			// gVisor mounts a tmpfs over an empty /tmp, so downloads there would
			// use the sandbox's memory. If /tmp contains this directory, which
			// every desktop has, it stays on the root file system and under its
			// limit.
			{Destination: "/tmp/.X11-unix", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "noexec", "mode=1777", "size=64k"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.NetworkNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}},
		},
		Annotations: map[string]string{
			launch.AnnotationMemory: strconv.FormatInt(s.MemoryMB<<20, 10),
			launch.AnnotationCPUs:   strconv.Itoa(int(math.Ceil(s.CPUs))),
		},
	}
	addImage(spec, s, dir)
	for _, m := range s.Mounts {
		access := "rw"
		if m.ReadOnly {
			access = "ro"
		}
		// Not rbind: file systems mounted below the source on the host must not be
		// visible inside.
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: m.Destination, Type: "bind", Source: m.Source, Options: []string{"bind", "nosuid", "nodev", access}})
	}
	return spec
}

// rlimits limit the processes that one user inside may start. The sentry counts
// processes and threads per user and refuses further ones with EAGAIN.
// CAP_SYS_ADMIN and CAP_SYS_RESOURCE are exempt, and only the guest has one of
// them. Root may use many users; then the host's limits on memory and threads end
// the sandbox.
func rlimits(s sandbox.Spec) []specs.POSIXRlimit {
	n := uint64(s.Processes)
	limits := []specs.POSIXRlimit{
		{Type: "RLIMIT_NPROC", Soft: n, Hard: n},
		{Type: "RLIMIT_NOFILE", Soft: 1 << 16, Hard: 1 << 16},
		{Type: "RLIMIT_CORE", Soft: 0, Hard: 0},
	}
	if size := uint64(s.LargestMB) << 20; size > 0 {
		limits = append(limits, specs.POSIXRlimit{Type: "RLIMIT_FSIZE", Soft: size, Hard: size})
	}
	return limits
}

// flags returns gVisor's configuration for one sandbox.
func flags(s sandbox.Spec, dir string) []string {
	return []string{
		"--platform=systrap", // needs no device of the host
		"--network=none",     // none of the host's network; the link follows later
		"--gofer-network-namespace=new",
		// Without this a compromised sentry would be root, with the right to open
		// files of the root file system on the host. With it the sentry is another
		// user and asks the gofer.
		"--directfs=false",
		"--host-uds=none", "--host-fifo=none", "--character-device-policy=emulated-only",
		"--ignore-cgroups",       // we manage them, see cgroup.go
		"--host-settings=ignore", // gVisor must not change the machine's settings
		// Writes go to an unnamed file, which disappears with the last process that
		// has it open, also after a crash.
		"--overlay2=root:dir=" + dir + ",size=" + strconv.FormatInt(s.DiskMB<<20, 10),
		"--allow-suid", // for sudo; only inside
		"--net-raw=false",
		"--oci-seccomp=false",
		// gVisor would compare the snapshot's specification with the one for the
		// restore. We do that ourselves, see snapshot.go: annotations, limits and
		// environment may differ.
		"--restore-spec-validation=ignore",
		"--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK", // the launcher's program is the sentry
	}
}

func writeSpec(dir string, spec *specs.Spec) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("write specification: %w", err)
	}
	if len(b) > launch.MaxSpec {
		return fmt.Errorf("%w: Env is too large", sandbox.ErrInvalid)
	}
	// 0600, since the launcher opens it for its readers.
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		return fmt.Errorf("write specification: %w", err)
	}
	return nil
}

// readMounts returns the mounts and the images of a sandbox, also of one that another
// process started.
func readMounts(dir string) ([]snapshotMount, imageNames, error) {
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, imageNames{}, fmt.Errorf("read specification: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return nil, imageNames{}, fmt.Errorf("read specification: %w", err)
	}
	out := []snapshotMount{}
	for _, m := range spec.Mounts {
		if m.Type == "bind" {
			out = append(out, snapshotMount{Destination: m.Destination, ReadOnly: slices.Contains(m.Options, "ro")})
		}
	}
	return out, namesOfImages(&spec), nil
}
