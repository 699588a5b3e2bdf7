package createostest

import (
	"encoding/base64"
	"encoding/binary"
	"strings"
)

// checkSSHKeys accepts OpenSSH public keys. They are kept and shown; there is
// nothing to log in to.
func checkSSHKeys(keys []string) error {
	for _, key := range keys {
		if !validSSHKey(key) {
			return badField("ssh_pubkeys", "a key is not an OpenSSH public key")
		}
	}
	return nil
}

// validSSHKey tells whether a line is a type, the key in base64 and perhaps a
// comment. The key begins with its type once more, and its length.
func validSSHKey(line string) bool {
	fields := strings.Fields(line)
	if len(fields) < 2 || strings.ContainsAny(strings.TrimSpace(line), "\r\n") {
		return false
	}
	kind := fields[0]
	key, err := base64.StdEncoding.DecodeString(fields[1])
	if err != nil || len(key) < 4 {
		return false
	}
	length, rest := binary.BigEndian.Uint32(key), string(key[4:])
	return int64(length) == int64(len(kind)) && len(rest) > len(kind) && strings.HasPrefix(rest, kind)
}
