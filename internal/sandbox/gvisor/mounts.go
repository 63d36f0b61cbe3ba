package gvisor

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// coverRootfs lays a layer over the root file system in which gVisor can make
// the directories that mounts need: it makes them in the root file system
// itself, which all sandboxes of a template share and in which each would see
// where others mount something. The layer is in memory, and is gone with the
// last process that sees it.
//
// The launcher must have a mount namespace of its own: then nothing of this is
// on the host, and nobody who removes the sandbox's directory can come through
// a mount to what is not the sandbox's.
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
	// By numbers: a path may have the commas and colons that these options
	// are divided by.
	options := fmt.Sprintf("lowerdir=/proc/self/fd/%d,upperdir=%supper,workdir=%swork", lower.Fd(), at, at)
	if err := unix.Mount("overlay", rootfs, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("lay over root file system (does the kernel have overlayfs?): %w", err)
	}
	return nil
}
