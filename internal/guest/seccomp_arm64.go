package guest

import "golang.org/x/sys/unix"

// auditArch is the ABI of this program's system calls.
const auditArch = unix.AUDIT_ARCH_AARCH64
