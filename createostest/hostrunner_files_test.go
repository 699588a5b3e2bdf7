//go:build unix

package createostest

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func readFile(t *testing.T, m *hostMachine, path string) string {
	t.Helper()
	f, size, err := m.open(path)
	require.NoError(t, err)
	defer f.Close()
	data, err := io.ReadAll(f)
	require.NoError(t, err)
	require.EqualValues(t, len(data), size)
	return string(data)
}

func TestHostRunnerFiles(t *testing.T) {
	r := testRunner(t)
	m := testMachine(t, r, nil)
	ws := r.workspace()
	require.NoDirExists(t, ws)
	require.DirExists(t, filepath.Dir(ws))
	path := ws + "/new/dir/file"

	_, _, err := m.open(path)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorIs(t, m.remove(path), fs.ErrNotExist)

	content := "long content\x00\xff"
	n, err := m.put(path, strings.NewReader(content))
	require.NoError(t, err)
	require.EqualValues(t, len(content), n)
	require.Equal(t, content, readFile(t, m, path))

	require.NoError(t, os.Chmod(path, 0o755))
	_, err = m.put(path, strings.NewReader("short"))
	require.NoError(t, err)
	require.Equal(t, "short", readFile(t, m, path))
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.EqualValues(t, 0o755, info.Mode(), "replacing keeps the mode")

	cut := errors.New("connection lost")
	n, err = m.put(path, io.MultiReader(strings.NewReader("part"), iotest.ErrReader(cut)))
	require.ErrorIs(t, err, cut)
	require.EqualValues(t, 4, n)

	_, err = m.put(path+"/below", strings.NewReader("x"))
	require.Error(t, err, "a file is no directory")
	require.NoError(t, m.remove(path))
	require.NoFileExists(t, path)

	home := filepath.Join(m.home(), "file")
	_, err = m.put(home, strings.NewReader("x"))
	require.NoError(t, err, "the machine's own directory")
}

func TestHostRunnerFilesStayInside(t *testing.T) {
	r := testRunner(t)
	m, other := testMachine(t, r, nil), testMachine(t, r, nil)
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	require.NoError(t, os.WriteFile(secret, []byte("secret"), 0o600))

	ws := filepath.Dir(r.workspace())
	link := func(target, name string) string {
		path := filepath.Join(ws, name)
		require.NoError(t, os.Symlink(target, path))
		return path
	}
	up := strings.Repeat("../", 20)
	require.NoError(t, os.Mkdir(ws+"/dir", 0o700))
	require.NoError(t, os.WriteFile(ws+"/dir/file", []byte("inside"), 0o600))

	bad := map[string]string{
		"empty":                  "",
		"relative":               "file",
		"outside":                secret,
		"prefix only":            r.dir + "-other/file",
		"the directory itself":   r.dir,
		"dots":                   ws + "/" + up + secret,
		"directory":              ws + "/dir",
		"directory with a slash": ws + "/dir/",
		"new directory":          ws + "/new/",
		"NUL":                    ws + "/a\x00b",
		"name too long":          ws + "/" + strings.Repeat("x", 300),
		"fifo":                   makeFIFO(t, ws+"/fifo"),
		"another machine":        other.home() + "/file",
		"link to file outside":   link(secret, "abs"),
		"relative link outside":  link(up+secret, "rel"),
		"through link outside":   link(outside, "absdir") + "/secret",
		"through relative link":  link(up+outside, "reldir") + "/secret",
		"dangling link outside":  link(outside+"/new", "dangling"),
		"link to itself":         link("loop", "loop"),
		"new file behind link":   link(up+outside, "reldir2") + "/sub/new",
	}
	for name, path := range bad {
		t.Run(name, func(t *testing.T) {
			_, err := m.put(path, strings.NewReader("overwritten"))
			assert.ErrorIs(t, err, errBadPath, "put")
			_, _, err = m.open(path)
			assert.ErrorIs(t, err, errBadPath, "open")
		})
	}
	for _, name := range []string{"empty", "outside", "dots", "directory", "through link outside", "through relative link"} {
		assert.ErrorIs(t, m.remove(bad[name]), errBadPath, name)
	}
	left, err := os.ReadDir(outside)
	require.NoError(t, err)
	require.Len(t, left, 1)
	content, err := os.ReadFile(secret)
	require.NoError(t, err)
	require.Equal(t, "secret", string(content))

	inner := link("dir/file", "inner")
	require.Equal(t, "inside", readFile(t, m, inner), "a link that stays inside is followed")
	require.NoError(t, m.remove(inner))
	require.NoError(t, m.remove(bad["link to file outside"]), "removes the link")
	require.FileExists(t, ws+"/dir/file")
	require.FileExists(t, secret)
}
