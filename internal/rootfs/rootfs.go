// Package rootfs holds root file systems in memory as trees. A [Tree] has the names,
// owners and modes of all files. Their contents stay where they are: in an EROFS image
// or in the tar archive of a layer.
//
// Layers are never unpacked onto the host. So a hostile layer cannot write outside of
// its root: there are no paths of the host to write to.
package rootfs

import "errors"

// ErrInvalid means that a layer is malformed or beyond a limit. The text names the
// entry and the limit.
var ErrInvalid = errors.New("invalid layer")

// Limits bound what layers may hold.
type Limits struct {
	Bytes   int64 // of all contents of the tree; 0 means 32 GiB
	Entries int   // files and directories of the tree; 0 means 4 million
}
