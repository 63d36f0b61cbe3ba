package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// A volumeRow is what the API tells of a volume.
type volumeRow struct {
	VolumeID, Name string
	CreatedAt      time.Time
	SizeMB, UsedMB int64
}

func volumeCommand() *command {
	var c Config
	var depth int
	return group("volume", "create NAME|list|ls NAME [PATH]|delete NAME [flags]", "make, list, look into and delete volumes", `
postern volume create NAME      makes an empty volume
postern volume list             lists the volumes, and how full they are
postern volume ls NAME [PATH]   lists the files in one; --depth for those below
postern volume delete NAME      removes one, with everything in it

A volume is a directory of files that outlives sandboxes. Its creator mounts it
at create, into one sandbox or into many at the same time:

  const volume = await Volume.create('data')
  await Sandbox.create({ volumeMounts: { '/mnt/data': volume } })

What one sandbox writes the others see at once. Without any sandbox its files are
read and written with the SDK's Volume, which needs one more variable:

  export E2B_VOLUME_API_URL=http://127.0.0.1:3000

Each volume is a file system of its own, with a limit that nothing inside can get
past: postern up --volume-size. It is kept below the server's data directory, on
this machine alone, and is not part of postern backup. One that a sandbox has
mounted is not deleted.`,
		func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.IntVar(&depth, "depth", 1, "ls: `levels` of directories, at most 10")
		}, map[string]runner{
			"create": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				name, err := oneArg(args, "NAME")
				if err != nil {
					return err
				}
				var v volumeRow
				if err := l.call(ctx, "POST", "/volumes", map[string]string{"name": name}, &v); err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "volume  %s (%s), holds %d MiB\n", v.Name, v.VolumeID, v.SizeMB)
				return err
			}),
			"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				list, err := l.volumes(ctx)
				if err != nil {
					return err
				}
				rows := [][]string{{"NAME", "ID", "ON DISK", "HOLDS", "CREATED"}}
				for _, v := range list {
					rows = append(rows, []string{v.Name, v.VolumeID, fmt.Sprintf("%d MiB", v.UsedMB), fmt.Sprintf("%d MiB", v.SizeMB), v.CreatedAt.Local().Format(time.DateTime)})
				}
				return table(out, rows)
			}),
			"ls": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) < 1 || len(args) > 2 {
					return fmt.Errorf("%w: want NAME and perhaps PATH, got %d arguments", errUsage, len(args))
				}
				path := "/"
				if len(args) == 2 {
					path = args[1]
				}
				return l.listVolume(ctx, args[0], path, depth, out)
			}),
			"delete": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				name, err := oneArg(args, "NAME")
				if err != nil {
					return err
				}
				v, err := l.volume(ctx, name)
				if err != nil {
					return err
				}
				if err := l.call(ctx, "DELETE", "/volumes/"+v.VolumeID, nil, nil); err != nil {
					return err
				}
				_, err = fmt.Fprintln(out, "deleted", v.Name)
				return err
			}),
		})
}

func (l *local) volumes(ctx context.Context) (list []volumeRow, err error) {
	err = l.call(ctx, "GET", "/volumes", nil, &list)
	return list, err
}

// volume finds a volume by its name or id.
func (l *local) volume(ctx context.Context, name string) (volumeRow, error) {
	list, err := l.volumes(ctx)
	if err != nil {
		return volumeRow{}, err
	}
	for _, v := range list {
		if v.Name == name || v.VolumeID == name {
			return v, nil
		}
	}
	return volumeRow{}, fmt.Errorf("there is no volume %q; postern volume list shows those that there are", name)
}

func (l *local) listVolume(ctx context.Context, name, path string, depth int, out io.Writer) error {
	v, err := l.volume(ctx, name)
	if err != nil {
		return err
	}
	var es []struct {
		Path, Type, Target string
		Size               int64
		Mode, UID, GID     uint32
		MTime              time.Time
	}
	q := url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}}
	err = l.call(ctx, "GET", "/volumecontent/"+v.VolumeID+"/dir?"+q.Encode(), nil, &es)
	if errors.Is(err, errNotFound) {
		return fmt.Errorf("there is no %q in volume %s", path, v.Name)
	}
	if err != nil {
		return err
	}
	rows := [][]string{{"TYPE", "MODE", "OWNER", "SIZE", "MODIFIED", "PATH"}}
	for _, e := range es {
		// Names come from sandboxes: one may hold what moves a terminal's cursor.
		p := printable(e.Path)
		if e.Target != "" {
			p += " -> " + printable(e.Target)
		}
		rows = append(rows, []string{e.Type, fmt.Sprintf("%04o", e.Mode), fmt.Sprintf("%d:%d", e.UID, e.GID), strconv.FormatInt(e.Size, 10), e.MTime.Local().Format(time.DateTime), p})
	}
	return table(out, rows)
}

// wanted returns how many sandboxes, running or paused, are to have a volume.
func (d *daemon) wanted(ctx context.Context, who auth.Principal, name string) (n int, err error) {
	all, err := d.fleet.List(ctx, who, false)
	for _, s := range all {
		if slices.ContainsFunc(s.Options.Volumes, func(v sandbox.VolumeMount) bool { return v.Name == name }) {
			n++
		}
	}
	return n, err
}
