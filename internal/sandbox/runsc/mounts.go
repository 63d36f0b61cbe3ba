package runsc

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// coverRootfs puts an overlay over the root file system in which gVisor can create
// mount points. Without it gVisor creates them in the root file system itself. All
// sandboxes of a template share that, so each would see where others mount
// something. The overlay is in memory, and disappears with the last process that
// sees it.
//
// The launcher must have a mount namespace of its own. Then the overlay is
// invisible on the host, and removing the sandbox's directory cannot reach files
// through a mount.
func coverRootfs(rootfs, dir string) error {
	lower, err := os.Open(rootfs)
	if err != nil {
		return fmt.Errorf("open root file system: %w", err)
	}
	defer lower.Close()
	points := filepath.Join(dir, "mountpoints")
	if err := os.Mkdir(points, 0o700); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount("tmpfs", points, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=1m,nr_inodes=4096,mode=0700"); err != nil {
		return fmt.Errorf("mount layer: %w", err)
	}
	upper, err := os.Open(points)
	if err != nil {
		return fmt.Errorf("open layer: %w", err)
	}
	defer upper.Close()
	at := fmt.Sprintf("/proc/self/fd/%d/", upper.Fd())
	for _, d := range []string{"upper", "work"} {
		if err := os.Mkdir(at+d, 0o755); err != nil {
			return fmt.Errorf("make layer: %w", err)
		}
	}
	// By descriptor numbers: a path may contain commas and colons, which separate
	// these options.
	options := fmt.Sprintf("lowerdir=/proc/self/fd/%d,upperdir=%supper,workdir=%swork", lower.Fd(), at, at)
	if err := unix.Mount("overlay", rootfs, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("lay over root file system (does the kernel have overlayfs?): %w", err)
	}
	return nil
}
