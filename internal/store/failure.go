package store

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sys/unix"
	modernc "modernc.org/sqlite"
)

// DiskFullText is the message to clients for an error that [DiskFull] reports.
const DiskFullText = "the server's disk is full, and nothing was stored: its operator frees space on the disk of the data directory (df -h; postern sandbox kill, postern template prune), then repeat the request"

// Codes of errors: https://sqlite.org/rescode.html, and appendix A of PostgreSQL's manual.
const (
	sqliteCorrupt  = 11
	sqliteFull     = 13
	sqliteNotADB   = 26
	sqliteShmSize  = 4874 // SQLITE_IOERR_SHMSIZE: no room for the write-ahead log's index
	postgresFull   = "53100"
	postgresBroken = "XX001"
)

// DiskFull reports whether err says that a disk, or a quota on it, has no more room: that of
// the database, or of a file beside it.
func DiskFull(err error) bool {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return true
	}
	code := sqliteCode(err)
	return code&0xff == sqliteFull || code == sqliteShmSize || postgresCode(err) == postgresFull
}

// Damaged reports whether err says that the database itself is damaged.
func Damaged(err error) bool {
	code := sqliteCode(err)
	return code&0xff == sqliteCorrupt || code&0xff == sqliteNotADB || postgresCode(err) == postgresBroken
}

// withWay adds to an error about a damaged database what to do.
func withWay(err error, source string) error {
	if !Damaged(err) {
		return err
	}
	if isPostgres(source) {
		return fmt.Errorf("%w: the database is damaged: keep it as it is, see what PostgreSQL's log says, and restore a backup (docs/tasks/backup.md)", err)
	}
	return fmt.Errorf(`%w: the database is damaged: start nothing on it, keep a copy of the file and of its -wal, see what is wrong (sqlite3 %q "PRAGMA integrity_check"), and restore the newest backup that "postern audit verify --file COPY" accepts (docs/tasks/backup.md)`, err, source)
}

// sqliteCode returns the extended result code of an error of SQLite, or 0.
func sqliteCode(err error) int {
	if e, ok := errors.AsType[*modernc.Error](err); ok {
		return e.Code()
	}
	return 0
}

func postgresCode(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}
